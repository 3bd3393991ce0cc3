{#- Audit-Write-Audit-Publish: a reader's own bounds. -#}

{% test audit_within(model, audit, min=none, max=none) %}
    {#- Fails for each published period whose measured value is out of bounds, and when nothing was ever measured. -#}
    {%- do lakehouse_patterns.require(
        min is not none or max is not none, 'audit_within needs a bound: min, max or both'
    ) -%}
    {%- for name, bound in {'min': min, 'max': max}.items() if bound is not none -%}
        {%- do lakehouse_patterns._awap_require_bound(name ~ ' of audit_within', bound, 'measure') -%}
    {%- endfor -%}
    {{ lakehouse_patterns._awap_beyond_sql(
        lakehouse_patterns.relation_beside(model, '__audit_results'), audit, min, max
    ) }}
{% endtest %}


{% macro _awap_beyond_sql(results, audit, min, max) %}
    {#-
        NaN and infinity are within no bounds. A value that is NULL without an issue is a change without history, which
        nobody can judge yet.
    -#}
    {%- set conditions = [lakehouse_patterns._is_finite_sql('measured')] -%}
    {%- do conditions.append('measured >= ' ~ min) if min is not none -%}
    {%- do conditions.append('measured <= ' ~ max) if max is not none -%}
select
    run,
    measured,
    threshold as threshold_of_publisher
from {{ results }}
where
    audit = {{ lakehouse_patterns.text_literal(audit) }}
    and (measured is not null or issue is not null)
    and not ({{ conditions | join(' and ') }})

union all

select
    'never audited' as run,
    cast(null as double) as measured,
    cast(null as string) as threshold_of_publisher
from {{ results }}
having count_if(audit = {{ lakehouse_patterns.text_literal(audit) }}) = 0
{%- endmacro %}
